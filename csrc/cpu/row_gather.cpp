#include <algorithm>

#include "../common/floats.h"
#include "kernels.h"
#include "row_positions.h"

namespace dct::cpu {
namespace {

template <typename X, typename Value>
void gather_rows(const RowGatherArgs& args, const Parallel& parallel) {
  const int64_t bytes = position_bytes(args.width, args.k);
  const PositionEncoding encoding = position_encoding(args.width, args.k);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    for (int64_t row = span.begin; row < span.end; ++row) {
      const X* x = static_cast<const X*>(args.x) + row * args.width;
      Value* values = static_cast<Value*>(args.values) + row * args.k;
      std::fill_n(values, args.k, Value{});  // the value of slots that are not accepted
      for_each_position(args.positions + row * bytes, encoding, args.width, args.k,
                        [&](int64_t slot, int64_t column) {
                          values[slot] = round_to<Value>(to_float(x[column]));
                        });
    }
  });
}

}  // namespace

void row_gather(const RowGatherArgs& args, const Parallel& parallel) {
  dispatch(args.x_dtype, [&](auto x) {
    dispatch(args.value_dtype,
             [&](auto value) { gather_rows<decltype(x), decltype(value)>(args, parallel); });
  });
}

}  // namespace dct::cpu
