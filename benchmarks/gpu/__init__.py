"""The parts of ``make gpu-check`` (:mod:`benchmarks.gpu_check`)."""
