"""Operations of the GPU, in Triton: one file each, held to `kernels.reference` by the tests."""
