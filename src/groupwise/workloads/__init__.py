"""What Groupwise trains: each workload is a policy, a way to roll it out, its rewards and its scores."""
