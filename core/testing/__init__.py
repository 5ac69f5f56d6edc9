"""For tests, demos and benchmarks: a deterministic model without key or network (`understudy.testing.offline`)."""
