"""What a lease costs, and whether that stays so as a run grows."""
