"""What is known of model families, a file each."""
