"""What the service costs, in front of a stand-in for the runtime that computes nothing and streams at a set pace."""
