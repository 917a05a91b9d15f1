"""The engine's hot path on CPUs: kernels in C++, one call a step. See `csrc/api.h` for the interface."""
