"""What an administrator does with a store: archives, retention, repair."""
