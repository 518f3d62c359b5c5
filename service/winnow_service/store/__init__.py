"""Where policies and keys are kept: one interface, two stores behind it, and a copy in memory that outlives both."""
