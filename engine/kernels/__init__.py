"""Device kernels in Triton, and the torch functions that define what each must compute (``reference``)."""
