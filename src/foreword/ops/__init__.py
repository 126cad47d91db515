"""The tensor operations of a round, in torch and as kernels. No other package asks which device it runs on."""
