// parser.h -- parses PTX statements, without interpreting the opcodes.
//
// Accepts the output of nvcc and LLVM, which has one statement per line. For other input, the error
// message contains the line.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Statement {
  int line;
  std::string text;
  std::string guard;  // "%p1" or "!%p1" after @; else empty
  std::string opcode;
  std::vector<std::string> operands;  // as written: "%r1", "[%rd2+8]", "{%r1, %r2}", "0f3F800000"
};

// A parameter, or a variable in shared memory.
struct Variable {
  std::string name;
  int64_t alignment = 1, bytes = 0;
};

struct Registers {
  int bytes;  // of each register; a predicate has 1
  int count;  // 0 if the declaration is a single name, without a count
};

struct Entry {
  std::string name;
  std::vector<Variable> parameters, shared;
  std::map<std::string, Registers> registers;  // by prefix: "%r"
  std::vector<Statement> body;
  std::map<std::string, int> labels;  // index into body
};

struct Module {
  std::string text;
  std::map<std::string, Entry> entries;
  std::vector<Variable> shared;  // "extern" variables have 0 bytes until a launch
};

Module parse(const std::string& text);

int bytes_of_type(const std::string& type);  // "u32"

}  // namespace ptx
