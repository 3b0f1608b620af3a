// row_pack behind a C function, for variants.py.
#include "cuda/row_pack.cuh"

extern "C" int64_t row_pack(const void* x, int64_t x_dtype, int64_t rows, int64_t width, int64_t k,
                            void* values, int64_t value_dtype, uint8_t* positions,
                            cudaStream_t stream) {
  dct::RowPackArgs args = {};
  args.x = x;
  args.x_dtype = static_cast<dct::DType>(x_dtype);
  args.rows = rows;
  args.width = width;
  args.k = k;
  args.values = values;
  args.value_dtype = static_cast<dct::DType>(value_dtype);
  args.positions = positions;
  return dct::cuda::row_pack(args, stream);
}
