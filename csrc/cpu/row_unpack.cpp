#include <algorithm>

#include "../common/floats.h"
#include "kernels.h"
#include "row_positions.h"
#include "streaming.h"

namespace dct::cpu {
namespace {

template <typename Value, typename Out>
void unpack_rows(const RowUnpackArgs& args, const Parallel& parallel) {
  const int64_t bytes = position_bytes(args.width, args.k);
  const PositionEncoding encoding = position_encoding(args.width, args.k);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    for (int64_t row = span.begin; row < span.end; ++row) {
      const Value* values = static_cast<const Value*>(args.values) + row * args.k;
      Out* out = static_cast<Out*>(args.out) + row * args.width;
      prefetch_ahead(out, args.width);
      std::fill_n(out, args.width, Out{});
      for_each_position(args.positions + row * bytes, encoding, args.width, args.k,
                        [&](int64_t slot, int64_t column) {
                          out[column] = round_to<Out>(to_float(values[slot]));
                        });
    }
  });
}

}  // namespace

void row_unpack(const RowUnpackArgs& args, const Parallel& parallel) {
  dispatch(args.value_dtype, [&](auto value) {
    dispatch(args.out_dtype,
             [&](auto out) { unpack_rows<decltype(value), decltype(out)>(args, parallel); });
  });
}

}  // namespace dct::cpu
