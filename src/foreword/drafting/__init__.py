"""What several methods share: trees, graphs, heads, training losses, pseudo rows, the small model, the draft vocabulary."""
