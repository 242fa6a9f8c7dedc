"""What a run leaves: the record, where its numbers come from, and intervals over repeats."""
