// dct_kernels/_load.py reads this text in the file, also where the library does not load.

#include <torch/headeronly/version.h>

extern "C" {
__attribute__((used, visibility("hidden"))) extern const char dct_built_with[] =
    "dct_kernels built with torch " TORCH_VERSION;
}
