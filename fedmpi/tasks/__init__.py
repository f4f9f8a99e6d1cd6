"""What is learned, and how well: metrics and what they are taken on."""
