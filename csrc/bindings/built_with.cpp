// dct_kernels/_load.py reads this text in the file, even if the library does not load, and refuses
// a library whose digest is not that of the schemas in dct_kernels.

#include <torch/headeronly/version.h>

extern "C" {
__attribute__((used, visibility("hidden"))) extern const char dct_built_with[] =
    "dct_kernels built with torch " TORCH_VERSION " for schemas 7dc6adf6";
}
