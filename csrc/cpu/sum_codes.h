#pragma once

// Adds codes times scales to a Group of sums in registers, and writes these sums.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "streaming.h"
#include "unpack_codes.h"

namespace dct::cpu {

// Adds a code times `scale` to every entry of `sum`. The first code is that of column `column` in
// the row of codes. Reads at most 64 bytes, starting at the byte of the first code.
template <RowFormat kFormat, typename Unpack, typename Sum>
void add_codes(Unpack, const uint8_t* codes, int64_t column, float scale, Sum& sum) {
  using Floats = typename Sum::Floats;
  if constexpr (kFormat == RowFormat::kInt8) {
    sum.for_each([&](Floats& floats, int i) {
      Floats more;
      Sum::Own::widen(reinterpret_cast<const int8_t*>(codes + column) + i, more);
      floats += more * scale;
    });
  } else {
    // The table stays in registers, because each load reads exactly the bytes of one store.
    Entries entries;
    for (int i = 0; i < kMostEntries; i += Sum::Own::kCount) {
      Floats some;
      std::memcpy(&some, kCodes<kFormat>.of + i, sizeof(some));
      some *= scale;
      std::memcpy(entries.of + i, &some, sizeof(some));
    }
    for (int at = 0; at < Sum::kEntries; at += kCodeGroup) {
      Unpack::template look_up<kFormat>(codes, column + at, entries,
                                        [&](const Floats& more, int i) {
                                          if (at + i < Sum::kEntries)
                                            sum.of[(at + i) / Sum::Own::kCount] += more;
                                        });
    }
  }
}

// Multiplies the first n sums by `factor`, converts the products to Out and writes them. It may
// write all sums if `room` is at least their number. Later writes replace the excess.
template <typename Out, typename Sum>
void write_sums(Sum& sum, float factor, int64_t n, int64_t room, bool streams, Out* out) {
  using Floats = typename Sum::Floats;
  if (!streams) prefetch_ahead(out, n);
  if (!streams && room >= Sum::kEntries) n = Sum::kEntries;
  const bool aligned = reinterpret_cast<intptr_t>(out) % sizeof(Floats) == 0;
  if (std::is_same_v<Out, float> && n == Sum::kEntries && (aligned || !streams)) {
    auto* target = reinterpret_cast<float*>(out);
    sum.for_each([&](Floats& floats, int i) {
      const Floats scaled = floats * factor, nan = Floats{} + bits_to_float(kFloat32Nan);
      const Floats rounded = scaled == scaled ? scaled : nan;
      if (streams) {
        Sum::Own::stream(rounded, target + i);
      } else {
        std::memcpy(target + i, &rounded, sizeof(rounded));
      }
    });
    return;
  }
  alignas(64) Out rounded[Sum::kEntries];
  const auto* sums = reinterpret_cast<const float*>(&sum);
  for (int64_t i = 0; i < Sum::kEntries; ++i) rounded[i] = round_to<Out>(factor * sums[i]);
  if (streams) {
    stream_copy(out, rounded, n * sizeof(Out));
  } else if (n == Sum::kEntries) {
    std::memcpy(out, rounded, sizeof(rounded));
  } else {
    std::copy_n(rounded, n, out);
  }
}

}  // namespace dct::cpu
