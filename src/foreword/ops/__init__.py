"""What a round does to tensors. The only room that asks for the device."""
