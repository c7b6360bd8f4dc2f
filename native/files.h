// Files as they lie on disk: mapped, checked, and what a safetensors file holds.
#ifndef STRATA_FILES_H
#define STRATA_FILES_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "json.h"

namespace strata {
// Read-only; its pages are the file's and need not stay in memory.
class Mapped {
 public:
  explicit Mapped(const std::string& path) : path(path) {
    int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (handle < 0 || fstat(handle, &found) != 0 || !S_ISREG(found.st_mode)) {
      int reason = handle < 0 ? errno : EINVAL;
      if (handle >= 0) ::close(handle);
      throw Bad(path + " cannot be read: " + strerror(reason));
    }
    size = size_t(found.st_size);
    if (size) {
      void* at = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, handle, 0);
      data = at == MAP_FAILED ? nullptr : static_cast<const char*>(at);
    }
    ::close(handle);
    if (!data) throw Bad(path + (size ? " cannot be mapped" : " is empty"));
  }
  ~Mapped() { munmap(const_cast<char*>(data), size); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  std::string path;
  const char* data = nullptr;
  size_t size = 0;
};

// Against damage, not against malice; the polynomial of zlib. `mapped`: pages of a file, given back as it goes.
inline uint32_t crc32(const void* data, size_t size, bool mapped = false) {
  constexpr size_t CHUNK = 1 << 20;
  static const std::vector<uint32_t> table = [] {
    std::vector<uint32_t> made(256);
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
      made[i] = c;
    }
    return made;
  }();
  uint32_t c = 0xffffffffu;
  auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t from = 0; from < size; from += CHUNK) {
    size_t count = size - from < CHUNK ? size - from : CHUNK;
    for (size_t i = from; i < from + count; ++i) c = table[(c ^ bytes[i]) & 255] ^ (c >> 8);
    if (mapped) madvise(const_cast<unsigned char*>(bytes) + from, count, MADV_DONTNEED);
  }
  return ~c;
}

struct Stored {
  std::string dtype;
  std::vector<int64_t> shape;
  const char* data = nullptr;
  int64_t bytes = 0;
};

// How many elements; -1 where that is no number.
inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, size, &count) || count > (int64_t(1) << 40)) return -1;
  return count;
}

// By name. What the header says is checked against the file.
inline std::map<std::string, Stored> safetensors(const Mapped& file) {
  uint64_t header = 0;
  if (file.size < 8) throw Bad(file.path + " is no safetensors file: it is too short");
  memcpy(&header, file.data, 8);
  if (header > file.size - 8) throw Bad(file.path + " is no whole safetensors file: its header does not fit in it");
  std::map<std::string, Stored> made;
  try {
    int64_t rest = int64_t(file.size - 8 - header);
    Json json = Json::parse(file.data + 8, header);
    if (json.kind != Json::OBJECT) throw Bad("should hold tensors by name");
    for (auto& [name, entry] : json.entries()) {
      if (name == "__metadata__") continue;
      Stored one;
      one.dtype = entry.at("dtype").text("dtype");
      for (auto& size : entry.at("shape").list("shape")) one.shape.push_back(size.whole("a size", 0, int64_t(1) << 40));
      auto& offsets = entry.at("data_offsets").list("data_offsets");
      if (offsets.size() != 2) throw Bad("data_offsets should be two numbers");
      int64_t begin = offsets[0].whole("an offset", 0, rest), end = offsets[1].whole("an offset", begin, rest);
      int64_t item = one.dtype == "F32" || one.dtype == "I32" ? 4 : one.dtype == "I64" || one.dtype == "F64" ? 8 : 1;
      one.data = file.data + 8 + header + begin;
      one.bytes = end - begin;
      int64_t count = elements(one.shape);
      if (count < 0 || count * item != one.bytes) throw Bad("the size of " + name + " is not that of its shape");
      if (reinterpret_cast<uintptr_t>(one.data) % size_t(item)) throw Bad(name + " does not lie at a multiple of its size");
      made[name] = std::move(one);
    }
  } catch (const Bad& error) {
    throw Bad(file.path + ": the header " + error.what());
  }
  return made;
}
}  // namespace strata
#endif
