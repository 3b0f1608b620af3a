// matrices.cpp -- ldmatrix and stmatrix: a warp loads or stores matrices of 8x8 16-bit elements.
#include <cstring>
#include <utility>

#include "block.h"
#include "lanes.h"

namespace ptx {
namespace {

constexpr int kRows = 8, kBytes = 2, kRowBytes = kRows * kBytes;

// In each matrix, lane l has the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 in one register.
// In a transposed matrix, they are in column l / 4. rows[r] is row r % 8 of matrix r / 8.
void exchange(char* registers, const Instruction& i, char rows[][kRowBytes]) {
  for (int matrix = 0; matrix < i.count; ++matrix) {
    const Operand data = i.action == Action::kLoad ? i.to[matrix] : i.from[matrix];
    for (int element = 0; element < kRows * kRows; ++element) {
      int r = element / kRows, column = element % kRows;
      if (i.matrices == Matrices::kTransposed) std::swap(r, column);
      char* const in_register = registers + data.at + element * kBytes;
      char* const in_row = rows[matrix * kRows + r] + column * kBytes;
      if (i.action == Action::kLoad)
        std::memcpy(in_register, in_row, kBytes);
      else
        std::memcpy(in_row, in_register, kBytes);
    }
  }
}

}  // namespace

// Lane l provides the address of row l % 8 of matrix l / 8.
void Block::access_matrices(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) fail(warp, __builtin_ctz(lanes), i, "not all lanes participate");
  char* const registers = warp.arena.data();
  char rows[kLanes][kRowBytes];
  if (i.action == Action::kStore) exchange(registers, i, rows);
  for (int lane = 0; lane < kRows * i.count; ++lane) {
    int64_t address = i.displacement;
    if (i.address.at != kNone) address += lane_value<uint32_t>(registers, i.address, lane);
    const Place place = locate(warp, i, lane, address, kRowBytes);
    char* const memory = place.memory;
    order(warp, i, lane, address, memory, kRowBytes, rows[lane]);
    track(warp, i, lane, address, place, kRowBytes);
    if (i.action == Action::kLoad)
      std::memcpy(rows[lane], memory, kRowBytes);
    else
      std::memcpy(memory, rows[lane], kRowBytes);
  }
  if (i.action == Action::kLoad) exchange(registers, i, rows);
}

}  // namespace ptx
