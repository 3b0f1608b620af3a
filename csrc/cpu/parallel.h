#pragma once

// Runs a kernel in parallel, independent of the thread pool. The bindings use torch's threads, and
// the native tests use std::thread.

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace dct::cpu {

template <typename Signature>
class FunctionRef;

// A reference to a callable, which must outlive it. Unlike std::function it never allocates.
template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  template <typename Callable,
            typename = std::enable_if_t<!std::is_same_v<std::decay_t<Callable>, FunctionRef>>>
  FunctionRef(Callable&& callable)  // NOLINT: implicit, so that a lambda can be passed
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
        call_([](void* object, Args... args) -> Result {
          return (*static_cast<std::remove_reference_t<Callable>*>(object))(
              std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  Result (*call_)(void*, Args...);
};

struct Parallel {
  int64_t threads;  // the number of threads that `run` may use
  // Calls body(task) once for every task in [0, tasks), in any order and on any thread. Returns
  // when all tasks are done. `body` must not throw.
  FunctionRef<void(int64_t tasks, FunctionRef<void(int64_t task)> body)> run;
};

struct Share {
  int64_t begin, end;
};

// Part `index` of [0, total), split into `parts` parts of nearly equal size.
inline Share share(int64_t total, int64_t parts, int64_t index) {
  const int64_t each = total / parts, rest = total % parts;
  const int64_t begin = index * each + (index < rest ? index : rest);
  return {begin, begin + each + (index < rest ? 1 : 0)};
}

}  // namespace dct::cpu
