// platform.h -- the emulator's side of csrc/cuda/detail/platform.cuh.
#pragma once

#define DCT_SHARED(Type, name)      \
  static const char name##_tag = 0; \
  Type& name =                      \
      *static_cast<Type*>(emulator::shared_memory(&name##_tag, sizeof(Type), alignof(Type)))
#define DCT_DYNAMIC_SHARED(Type, name) \
  Type* name = static_cast<Type*>(emulator::dynamic_shared_memory())

namespace dct::cuda {

inline unsigned add_acquire_release(unsigned* address, unsigned value) {
  emulator::schedule_point();
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

}  // namespace dct::cuda
