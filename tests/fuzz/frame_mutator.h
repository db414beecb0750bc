// Mutations of a stream of frames that get past its checksums: libFuzzer changes bytes, and most of
// the time the checksums are made to fit again. And seeds: the golden frames, one file each.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/cpp/golden_messages.h"
#include "transport/csrc/crc32c.h"
#include "transport/csrc/wire.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace hymcache::fuzzing {

// Walks the frames from the start, as long as they look like frames.
inline void fit_checksums(std::uint8_t* data, std::size_t size) {
  wire::Header header;
  for (std::size_t at = 0; size - at >= sizeof header;) {
    std::memcpy(&header, data + at, sizeof header);
    header.magic = wire::kMagic;
    const std::size_t left = size - at - sizeof header;
    header.payload_bytes &= 0x7FFFF;  // not all of them are within the bounds
    const std::size_t payload_bytes = std::min<std::size_t>(header.payload_bytes, left);
    header.payload_crc32c = crc32c(0, data + at + sizeof header, payload_bytes);
    header.header_crc32c = crc32c(0, &header, sizeof header - sizeof header.header_crc32c);
    std::memcpy(data + at, &header, sizeof header);
    if (header.bulk_bytes > left - payload_bytes) return;
    at += sizeof header + payload_bytes + header.bulk_bytes;
  }
}

inline std::size_t mutate(std::uint8_t* data, std::size_t size, std::size_t max_size,
                          unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 8 != 0) fit_checksums(data, size);
  return size;
}

// Writes the seeds into the first folder among the arguments, where libFuzzer looks for its corpus.
inline void write_seeds(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    struct stat found{};
    if (argv[i][0] == '-' || ::stat(argv[i], &found) != 0 || !S_ISDIR(found.st_mode)) continue;
    for (const auto& [name, frame] : wire_testing::golden_messages()) {
      std::ofstream file(std::string(argv[i]) + "/seed_" + name, std::ios::binary);
      file.write(reinterpret_cast<const char*>(frame.data()),
                 static_cast<std::streamsize>(frame.size()));
    }
    return;
  }
}

}  // namespace hymcache::fuzzing

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return hymcache::fuzzing::mutate(data, size, max_size, seed);
}

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  hymcache::fuzzing::write_seeds(*argc, *argv);
  return 0;
}
