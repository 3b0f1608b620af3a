#pragma once

// The dense payload of one range, which holds all entries: header | rows of 1,024 entries. A row
// has the codes of its entries. In int8, int4 and ternary, a bfloat16 scale per 64 entries follows.
// docs/reference/payload.md describes the payload.

#include <cstdint>
#include <type_traits>

#include "floats.h"
#include "payload.h"
#include "row_layout.h"

namespace dct {

// A payload header stores these values.
enum class PayloadFormat : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 4,
  kInt4 = 5,
  kTernary = 6
};

// Calls `function` with the format as a type.
template <typename Function>
decltype(auto) dispatch(PayloadFormat format, Function&& function) {
  switch (format) {
    case PayloadFormat::kFloat32:
      return function(std::integral_constant<PayloadFormat, PayloadFormat::kFloat32>{});
    case PayloadFormat::kBFloat16:
      return function(std::integral_constant<PayloadFormat, PayloadFormat::kBFloat16>{});
    case PayloadFormat::kInt8:
      return function(std::integral_constant<PayloadFormat, PayloadFormat::kInt8>{});
    case PayloadFormat::kInt4:
      return function(std::integral_constant<PayloadFormat, PayloadFormat::kInt4>{});
    default:
      return function(std::integral_constant<PayloadFormat, PayloadFormat::kTernary>{});
  }
}

constexpr uint16_t kQuantizedVersion = 4;
constexpr int64_t kRow = 1024;               // elements; a block consists of whole rows
constexpr int64_t kScaled = 64;              // elements that share a scale
constexpr int64_t kScales = kRow / kScaled;  // per row

DCT_HOST_DEVICE constexpr bool has_scales(PayloadFormat format) {
  return format != PayloadFormat::kFloat32 && format != PayloadFormat::kBFloat16;
}

// For a format with scales, the format of row_quantize that encodes each group of 64 entries.
DCT_HOST_DEVICE constexpr RowFormat row_format(PayloadFormat format) {
  return format == PayloadFormat::kInt8   ? RowFormat::kInt8
         : format == PayloadFormat::kInt4 ? RowFormat::kInt4
                                          : RowFormat::kTernary;
}

// Bytes that hold the codes of 64 entries: 256, 128, 64, 32 or 13.
DCT_HOST_DEVICE constexpr int64_t scaled_code_bytes(PayloadFormat format) {
  return format == PayloadFormat::kFloat32    ? 4 * kScaled
         : format == PayloadFormat::kBFloat16 ? 2 * kScaled
                                              : code_bytes(kScaled, row_format(format));
}

// Bytes of the codes of a row, which precede its scales. A multiple of 16, like row_bytes().
DCT_HOST_DEVICE constexpr int64_t row_code_bytes(PayloadFormat format) {
  return kScales * scaled_code_bytes(format);
}

DCT_HOST_DEVICE constexpr int64_t row_bytes(PayloadFormat format) {
  return row_code_bytes(format) + (has_scales(format) ? kScales * kScaleBytes : 0);
}

DCT_HOST_DEVICE constexpr int64_t num_rows(int64_t numel) { return ceil_div(numel, kRow); }

// The minimum size of the payload of a range.
constexpr int64_t quantized_payload_bytes(int64_t numel, PayloadFormat format) {
  return static_cast<int64_t>(sizeof(PayloadHeader)) + num_rows(numel) * row_bytes(format);
}

// The header of a range with `numel` elements.
DCT_HOST_DEVICE inline PayloadHeader quantized_header(int64_t numel, PayloadFormat format,
                                                      bool non_finite) {
  PayloadHeader header = {};
  header.magic = kPayloadMagic;
  header.version = kQuantizedVersion;
  header.value_dtype = static_cast<uint8_t>(format);
  header.flags = non_finite ? kFlagNonFinite : 0;
  header.numel = static_cast<uint64_t>(numel);
  header.capacity = static_cast<uint32_t>(numel < 0xffffffff ? numel : 0xffffffff);
  header.count = header.capacity;
  return header;
}

// Validates an untrusted header against its range.
DCT_HOST_DEVICE inline bool quantized_header_ok(const PayloadHeader& header, int64_t numel,
                                                PayloadFormat format) {
  const uint32_t expected = quantized_header(numel, format, false).count;
  return header_kind_ok(header, kQuantizedVersion, format, kFlagNonFinite, numel) &&
         header.capacity == expected && header.count == expected;
}

}  // namespace dct
