// libstdc++'s shared_ptr reads this variable of glibc 2.32 to leave out atomic operations in a
// process of one thread. Here it always says that there may be more: so the library loads with the
// glibc 2.28 of manylinux_2_28 as well.

extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
