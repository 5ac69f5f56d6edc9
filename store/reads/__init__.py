"""What is read of the store, and changes nothing."""
