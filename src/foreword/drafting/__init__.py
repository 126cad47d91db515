"""What drafters share: trees, graphs, heads, lessons, transferred states, the draft vocabulary."""
