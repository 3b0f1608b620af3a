// dct_kernels/_load.py finds this text in the file, even if the library cannot be loaded. It
// refuses a library whose digest differs from the digest of the schemas in dct_kernels.

#include <torch/headeronly/version.h>

extern "C" {
__attribute__((used, visibility("hidden"))) extern const char dct_built_with[] =
    "dct_kernels built with torch " TORCH_VERSION " for schemas 7dc6adf6";
}
