// What torch draws on the CPU from a generator with a given seed: the same samples in the same order, the same crops and
// flips (strata/data/augmentation.py). Tested against torch.
#ifndef STRATA_RANDOM_H
#define STRATA_RANDOM_H

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace strata {
class Generator {
 public:
  explicit Generator(uint64_t seed) : engine(uint32_t(seed)) {}  // torch takes the lower half too

  // torch.randperm(count)
  std::vector<int64_t> permutation(int64_t count) {
    std::vector<int64_t> made(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) made[size_t(i)] = i;
    for (int64_t i = 0; i + 1 < count; ++i) std::swap(made[size_t(i)], made[size_t(i + int64_t(engine()) % (count - i))]);
    return made;
  }
  // torch.randint(0, below, (count,))
  std::vector<int64_t> integers(int64_t below, int64_t count) {
    std::vector<int64_t> made(static_cast<size_t>(count));
    for (auto& one : made) one = int64_t(uint64_t(engine()) % uint64_t(below));
    return made;
  }
  // torch.rand(count)
  std::vector<float> uniform(int64_t count) {
    std::vector<float> made(static_cast<size_t>(count));
    for (auto& one : made) one = float(engine() & 0xffffffu) * (1.0f / 16777216.0f);
    return made;
  }

 private:
  std::mt19937 engine;
};
}  // namespace strata
#endif
