"""Everything between a data file and the samples of a batch."""
