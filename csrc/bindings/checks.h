#pragma once

// Argument checks, in one form: `dct::<op>: <arg> must be <rule>, got <value>`. The functions and
// the words are those of dct_kernels/checks.py.

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "../common/dtype.h"

namespace dct {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr std::initializer_list<ScalarType> kFloats = {
    ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline constexpr std::initializer_list<ScalarType> kPayloadValues = {ScalarType::Float,
                                                                     ScalarType::BFloat16};

// A tensor argument by its name in the schema; `tensor` is null if it is absent.
struct Arg {
  Arg(const char* arg_name, const Tensor& value) : name(arg_name), tensor(&value) {}
  Arg(const char* arg_name, const std::optional<Tensor>& value)
      : name(arg_name), tensor(value.has_value() ? &*value : nullptr) {}
  const char* name;
  const Tensor* tensor;
};

class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  [[noreturn]] void fail(const char* arg, const std::string& rule, const std::string& got,
                         const char* verb = "be") const;
  [[noreturn]] void fail(const char* arg, const std::string& rule, int64_t got,
                         const char* verb = "be") const {
    fail(arg, rule, std::to_string(got), verb);
  }

  void require_int(const char* arg, int64_t value, int64_t low, int64_t high) const;
  void require_density(double density) const;
  DType require_dtype(const char* arg, ScalarType dtype,
                      std::initializer_list<ScalarType> allowed) const;

  // Contiguous, of one of `dtypes` and `dims`, on the device of `like`. Returns its dtype.
  DType require_tensor(const Arg& arg, std::initializer_list<ScalarType> dtypes,
                       std::initializer_list<int64_t> dims, const Arg& like) const;
  void require_numel(const Arg& arg, int64_t numel, const char* why) const;
  // Returns the scale's address, or null if it is absent.
  const float* require_scale(const Arg& arg, const Arg& like) const;
  void require_segments(const Tensor& segments, const Arg& like) const;

  // What looks at addresses and contents.
  void require_aligned(const Arg& arg) const;
  void require_apart(std::initializer_list<Arg> written, std::initializer_list<Arg> read) const;
  void require_ascending(const Tensor& segments, int64_t numel) const;

 private:
  const char* op_;
};

}  // namespace dct
