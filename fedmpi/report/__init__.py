"""Report of finished runs: a page that shows and compares them."""
