"""The public client, and what its connections to the services have in common. No Ray."""
