// libstdc++'s shared_ptr reads this variable of glibc 2.32 to skip atomic operations in a process
// with one thread. This definition always reports several threads. With it, the library also loads
// with glibc 2.28 (manylinux_2_28).

extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
