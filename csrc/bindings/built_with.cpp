// dct_kernels/_load.py reads this text from the library's file, even if the library cannot be
// loaded. If the digest differs from the digest of the schemas in dct_kernels, _load.py does not
// load the library.

#include <torch/headeronly/version.h>

extern "C" {
__attribute__((used, visibility("hidden"))) extern const char dct_built_with[] =
    "dct_kernels built with torch " TORCH_VERSION " for schemas 750c3e1a";
}
