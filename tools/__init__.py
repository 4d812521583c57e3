"""What is run on this repository and is no part of what it ships."""
