// relaxed.h -- what a block sees of the relaxed stores of others: they come late, and those to
// different addresses in any order. What it has seen of one address never goes back.
#pragma once

#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

namespace emulator {

class RelaxedWords {
 public:
  void stored(uint32_t block, const void* address, uint64_t old, uint64_t value) {
    Word& word = words_[address];
    if (word.versions.empty()) word.versions.push_back(old);
    word.versions.push_back(value);
    word.oldest[block] = word.versions.size() - 1;
  }

  // What `block` reads where `current` is the last value.
  uint64_t loaded(uint32_t block, const void* address, uint64_t current, std::mt19937& random) {
    const auto found = words_.find(address);
    if (found == words_.end()) return current;
    Word& word = found->second;
    size_t& oldest = word.oldest[block];
    size_t chosen = word.versions.size() - 1;
    while (chosen > oldest && random() % 2 == 0) --chosen;
    oldest = chosen;
    return word.versions[chosen];
  }

  // From now on all see the last value: of one address, which an atomic has updated, or of all,
  // since something was released. A GPU promises less.
  void show(const void* address) { words_.erase(address); }
  void show_all() { words_.clear(); }

 private:
  struct Word {
    std::vector<uint64_t> versions;
    std::unordered_map<uint32_t, size_t> oldest;  // that a block may still see
  };
  std::unordered_map<const void*, Word> words_;
};

}  // namespace emulator
