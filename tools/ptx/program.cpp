#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

namespace ptx {
namespace {

constexpr int64_t kApart = 256;  // unused bytes between variables in shared memory

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

std::vector<std::string> split_at_dots(const std::string& opcode) {
  std::vector<std::string> parts(1);
  for (char c : opcode) {
    if (c == '.')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

class Decoder {
 public:
  Decoder(const Module& module, const Entry& entry) {
    program_.entry = entry;
    for (const auto& [prefix, registers] : entry.registers) {
      if (registers.count == 0) named_[prefix] = allocate(registers.bytes);
      for (int n = 0; n < registers.count; ++n) {
        named_[prefix + std::to_string(n)] = allocate(registers.bytes);
      }
    }
    static const char* const kNames[kSpecials] = {"%tid.x", "%ctaid.x", "%nctaid.x"};
    for (int s = 0; s < kSpecials; ++s) {
      named_[kNames[s]] = allocate(4);
      program_.special[s] = named_[kNames[s]].at;
    }
    for (const Variable& parameter : entry.parameters) {
      const int64_t at = round_up(program_.parameter_bytes, parameter.alignment);
      program_.parameters_at.push_back(at);
      addresses_[parameter.name] = at;
      program_.parameter_bytes = at + parameter.bytes;
    }
    int64_t end = 0;
    for (const auto* variables : {&entry.shared, &module.shared}) {
      for (const Variable& variable : *variables) {
        const int64_t at = round_up(end, std::max<int64_t>(variable.alignment, 16));
        addresses_[variable.name] = at;
        program_.shared.push_back({at, at + variable.bytes});
        program_.dynamic_shared |= variable.bytes == 0;
        end = at + variable.bytes + kApart;
      }
    }
  }

  Program decode() {
    std::set<int> targets;
    for (const Statement& statement : program_.entry.body) {
      try {
        program_.code.push_back(instruction(statement));
      } catch (const Error& error) {
        throw Error(program_.entry.name + ": PTX line " + std::to_string(statement.line) + ": " +
                    error.what() + ": " + statement.text);
      }
      if (program_.code.back().kind == Kind::kBranch) targets.insert(program_.code.back().target);
    }
    for (int target : targets) program_.code[target].labelled = true;
    return std::move(program_);
  }

 private:
  Instruction instruction(const Statement& statement) {
    Instruction result = {};
    result.statement = &statement;
    if (!statement.guard.empty()) {
      result.guarded = true;
      result.negated = statement.guard[0] == '!';
      result.guard = reg(statement.guard.substr(result.negated ? 1 : 0));
    }
    const std::vector<std::string> parts = split_at_dots(statement.opcode);
    const std::vector<std::string>& operands = statement.operands;
    if (parts[0] == "bra") {
      const auto target = program_.entry.labels.find(operands.at(0));
      if (target == program_.entry.labels.end()) throw Error("no such label");
      result.kind = Kind::kBranch;
      result.target = target->second;
    } else if (parts[0] == "ret") {
      result.kind = Kind::kExit;
    } else if (statement.opcode == "bar.sync") {
      if (operands.size() != 1 || operands[0] != "0") throw Error("only bar.sync 0 is supported");
      result.kind = Kind::kBarrier;
    } else if (statement.opcode == "prefetch.global.L2" || parts[0] == "griddepcontrol") {
      result.kind = Kind::kCompute;
      result.run = [](char*, const Instruction&, uint32_t) {};  // a hint; kernels run in order
    } else if (parts[0] == "ld" || parts[0] == "st" || parts[0] == "atom" || parts[0] == "red") {
      memory(result, parts, operands);
    } else if (parts[0] == "mov" && operands.at(1)[0] == '{') {
      several(result, "pack", result.from, operands[1], result.to[0], operands[0]);
    } else if (parts[0] == "mov" && operands.at(0)[0] == '{') {
      several(result, "unpack", result.to, operands[0], result.from[0], operands[1]);
    } else {
      compute(result, statement.opcode, operands);
    }
    return result;
  }

  void several(Instruction& result, const char* form, Operand* parts, const std::string& group,
               Operand& whole, const std::string& one) {
    result.kind = Kind::kCompute;
    result.run = find_form(form)->run;
    whole = reg(one);
    const auto several = 1 + std::count(group.begin(), group.end(), ',');
    result.count = registers(parts, group, static_cast<int>(whole.bytes / several));
  }

  void compute(Instruction& result, const std::string& opcode,
               const std::vector<std::string>& operands) {
    const Form* form = find_form(opcode);
    if (form == nullptr) throw unknown(result);
    result.kind = form->kind;
    result.run = form->run;
    const bool has_result = !form->to.empty();
    if (operands.size() != form->from.size() + has_result) throw Error("wrong number of operands");
    bool wide = false;
    if (has_result) {
      const size_t bar = operands[0].find('|');  // "%r1|%p1": the second is optional
      result.to[0] = reg(operands[0].substr(0, bar));
      if (bar != std::string::npos)
        result.to[1] = second_result(*form, operands[0].substr(bar + 1));
      wide = result.to[0].bytes != form->to[0];
    }
    for (size_t i = 0; i < form->from.size(); ++i) {
      result.from[i] = operand(operands[i + has_result], form->from[i]);
      wide |= result.from[i].bytes != form->from[i];
    }
    if (wide) result.run = form->run_wide;
    if (result.run == nullptr) throw Error("a register and the instruction have different widths");
  }

  Operand second_result(const Form& form, const std::string& name) {
    if (form.to.size() < 2) throw Error("a second result is not supported");
    return operand(name, form.to[1]);
  }

  void memory(Instruction& result, const std::vector<std::string>& parts,
              const std::vector<std::string>& operands) {
    result.kind = Kind::kMemory;
    const bool load = parts[0] == "ld", store = parts[0] == "st", returns = parts[0] != "red";
    const bool atomic = !load && !store;
    result.action = load ? Action::kLoad : atomic ? Action::kAtomic : Action::kStore;
    result.space = Space::kGlobal;
    static const std::set<std::string> kHints = {"ca", "cg", "cs", "wb", "gpu", "sys"};
    const size_t last = parts.size() - 1;
    for (size_t p = 1; p < last; ++p) {
      const std::string& part = parts[p];
      if (part == "shared" || part == "shared::cta")
        result.space = Space::kShared;
      else if (part == "param")
        result.space = Space::kParameter;
      else if (part == "acq_rel" && atomic)
        result.ordered = true;
      else if (part == "v2" || part == "v4")
        result.count = part[1] - '0';
      else if (atomic && p == last - 1)
        result.update = find_update(part + "." + parts[last]);
      else if (part != "global" && !kHints.contains(part) && !(part == "relaxed" && atomic))
        throw unknown(result);
    }
    if (atomic && result.update == nullptr) throw unknown(result);
    result.element = static_cast<uint8_t>(bytes_of_type(parts[last]));
    result.is_signed = parts[last][0] == 's';

    const size_t results = load || (atomic && returns) ? 1 : 0;
    address(result, operands.at(results));
    if (results == 1) registers(result.to, operands[0]);
    if (!load) registers(result.from, operands.at(results + 1), result.element);
  }

  static Error unknown(const Instruction& i) {
    return Error("unknown opcode " + i.statement->opcode);
  }

  // "[%rd1]", "[%rd1+-8]", "[name]", "[name+8]"
  void address(Instruction& result, const std::string& text) {
    const size_t plus = text.find('+');
    const std::string base = text.substr(1, std::min(plus, text.size() - 1) - 1);
    result.displacement = plus == std::string::npos ? 0 : std::atoll(text.c_str() + plus + 1);
    if (base[0] == '%') {
      result.address = reg(base);
    } else {
      const auto found = addresses_.find(base);
      if (found == addresses_.end()) throw Error("no such variable");
      result.displacement += found->second;
    }
  }

  // Decodes one register or immediate, or several in braces. Returns the number of operands.
  uint8_t registers(Operand* into, const std::string& text, int bytes = 0) {
    if (text[0] != '{') {
      *into = operand(text, bytes);
      return 1;
    }
    uint8_t count = 0;
    for (size_t begin = 1; begin < text.size();) {
      const size_t end = text.find_first_of(",}", begin);
      into[count++] = operand(text.substr(begin, end - begin), bytes);
      begin = text.find_first_not_of(" ", end + 1);
    }
    return count;
  }

  Operand operand(const std::string& text, int bytes) {
    if (text == "_") return allocate(bytes);
    if (text[0] == '%' || named_.contains(text)) return reg(text);
    uint64_t value = 0;
    const auto variable = addresses_.find(text);
    if (variable != addresses_.end()) {
      value = variable->second;
    } else if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'd')) {
      value = std::strtoull(text.c_str() + 2, nullptr, 16);
    } else {
      char* end = nullptr;
      value = text[0] == '-' ? std::strtoll(text.c_str(), &end, 0)
                             : std::strtoull(text.c_str(), &end, 0);
      if (*end == 'U') ++end;
      if (*end != '\0') throw Error("unknown operand " + text);
    }
    if (bytes == 1) value = value != 0;
    const Operand result = allocate(bytes);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(&program_.arena[result.at + lane * bytes], &value, bytes);
    }
    return result;
  }

  Operand reg(const std::string& name) {
    const auto found = named_.find(name);
    if (found == named_.end()) throw Error("no such register " + name);
    return found->second;
  }

  Operand allocate(int bytes) {
    const Operand result = {static_cast<int32_t>(program_.arena.size()),
                            static_cast<uint8_t>(bytes)};
    // Registers start with an unusual value, and predicates with false.
    program_.arena.resize(program_.arena.size() + kLanes * bytes, bytes == 1 ? 0 : '\xcd');
    return result;
  }

  Program program_;
  std::map<std::string, Operand> named_;
  std::map<std::string, int64_t> addresses_;
};

}  // namespace

Program decode(const Module& module, const Entry& entry) { return Decoder(module, entry).decode(); }

}  // namespace ptx
