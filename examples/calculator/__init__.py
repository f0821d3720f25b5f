"""A two-step calculator: the agent that `molt-train demo` trains on the machine at hand."""
