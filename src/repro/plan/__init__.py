"""What there is to run: configuration, the jobs of a tier, and which of them share an allocation."""
