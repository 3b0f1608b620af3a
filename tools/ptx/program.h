// program.h -- a kernel, decoded once into instructions for the interpreter.
//
// The registers of a warp are in one arena, with 1, 2, 4 or 8 bytes for each of the 32 lanes. An
// operand is an offset into the arena. Immediates and special registers are also in the arena, so
// that all operands are read in the same way.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "parser.h"

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int32_t kNone = -1;  // no operand

enum class Kind : uint8_t {
  kCompute,
  kMemory,
  kBranch,
  kExit,
  kCollective,  // a .sync instruction, which waits for the lanes of its mask
  kBarrier,     // of the block
};

enum class Space : uint8_t { kGlobal, kShared, kParameter };
enum class Action : uint8_t { kLoad, kStore, kAtomic };

struct Instruction;
using Update = uint64_t (*)(uint64_t old, uint64_t operand);
// Executes an instruction for `lanes` of a warp.
using Compute = void (*)(char* registers, const Instruction&, uint32_t lanes);

struct Operand {
  int32_t at = kNone;
  uint8_t bytes = 0;  // of the register
};

struct Instruction {
  Kind kind;
  Compute run = nullptr;
  bool guarded = false, negated = false;
  bool labelled = false;  // is the target of a branch
  Operand guard, to[4], from[4];
  int32_t target = 0;

  // For memory instructions. Loads write to[0..count), and stores read from[0..count).
  Action action;
  Space space;
  bool is_signed = false, ordered = false;  // ordered: acquire and release
  uint8_t element = 0, count = 1;           // bytes and number of elements
  Operand address;
  int64_t displacement = 0;
  Update update = nullptr;

  const Statement* statement;
};

// The operation of an opcode, and the number of bytes of its operands.
struct Form {
  Compute run;
  std::vector<int> to, from;
  Kind kind = Kind::kCompute;
  Compute run_wide = nullptr;  // conversions allow wider registers
};
using Forms = std::unordered_map<std::string, Form>;  // by opcode
void add_collectives(Forms& forms);
// The form of a compute or collective opcode; null if the opcode is unknown.
const Form* find_form(const std::string& opcode);
// The update of an atomic such as "add.u32"; null if it is unknown.
Update find_update(const std::string& operation);

enum Special { kThread, kBlock, kBlocks, kSpecials };

struct Extent {
  int64_t begin, end;
};

struct Program {
  Entry entry;
  std::vector<Instruction> code;
  std::vector<char> arena;  // initial registers of a warp, and immediates
  int32_t special[kSpecials];
  std::vector<int64_t> parameters_at;  // byte offsets of the arguments
  int64_t parameter_bytes = 0;
  std::vector<Extent> shared;  // variables; a dynamically sized one comes last
  bool dynamic_shared = false;
};

// Throws an Error that contains the opcode if the opcode is unknown.
Program decode(const Module& module, const Entry& entry);

}  // namespace ptx
