// `import dct_kernels._C` must find a module, though all there is to it happens as the library is
// loaded: the registrations of the other files. By hand, because pybind11 cannot target abi3.

#include <Python.h>

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
