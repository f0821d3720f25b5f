"""What agents and graders that block do to the turns of the other rollouts in their worker."""
