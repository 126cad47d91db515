"""The tensor operations of a round, in torch and as kernels. Few other files ask which device
they run on; tests/rooms lists them."""
