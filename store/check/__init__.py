"""Whether the books balance."""
