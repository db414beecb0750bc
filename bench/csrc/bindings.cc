// Bindings of the benchmarks' reference copies; typed in hymcache/_core.pyi, section "bench".
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bench/csrc/index_filler.h"
#include "bench/csrc/reference_copy.h"
#include "bench/csrc/reference_echo.h"
#include "hymcache/csrc/error.h"
#include "transport/csrc/copy.h"

namespace py = pybind11;

namespace hymcache {
namespace {

using bench::ReferenceBlock;
using bench::ReferenceCopy;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// A batch as Python gives it. The buffers stay exported until it is destroyed (with the GIL held).
struct Batch {
  Batch(const std::vector<std::uint64_t>& offsets, const std::vector<py::buffer>& buffers,
        bool writable) {
    if (offsets.size() != buffers.size()) {
      throw Error(ErrorKind::kConfig, "as many offsets as buffers are needed");
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      infos.push_back(buffers[i].request(writable));
      const py::buffer_info& info = infos.back();
      blocks.push_back({.offset = offsets[i],
                        .client = {static_cast<std::byte*>(info.ptr),
                                   static_cast<std::size_t>(info.size * info.itemsize)}});
    }
  }
  std::vector<py::buffer_info> infos;
  std::vector<ReferenceBlock> blocks;
};

void get(ReferenceCopy& copy, const std::vector<std::uint64_t>& offsets,
         const std::vector<py::buffer>& into) {
  const Batch batch(offsets, into, true);
  const py::gil_scoped_release release;
  copy.get(batch.blocks);
}

void put(ReferenceCopy& copy, const std::vector<std::uint64_t>& offsets,
         const std::vector<py::buffer>& from) {
  const Batch batch(offsets, from, false);
  const py::gil_scoped_release release;
  copy.put(batch.blocks);
}

py::tuple listen() {
  std::uint16_t port = 0;
  UniqueFd listener = bench::listen_reference(&port);
  return py::make_tuple(listener.release(), port);
}

std::vector<py::bytes> last_keys(const bench::IndexFiller& filler, std::size_t count) {
  std::vector<py::bytes> keys;
  for (const ObjectKey& key : filler.last_keys(count)) {
    keys.emplace_back(reinterpret_cast<const char*>(key.data()), key.size());
  }
  return keys;
}

}  // namespace

void bind_bench(py::module_& m) {
  py::class_<ReferenceCopy>(m, "ReferenceCopy")
      .def("get", &get, py::arg("offsets"), py::arg("into"))
      .def("put", &put, py::arg("offsets"), py::arg("buffers"));
  py::class_<bench::SharedMemoryCopy, ReferenceCopy>(m, "SharedMemoryCopy")
      .def(py::init([](int socket, int memory, std::uint64_t memory_bytes, bool streaming) {
             return std::make_unique<bench::SharedMemoryCopy>(UniqueFd(socket), UniqueFd(memory),
                                                              memory_bytes, streaming);
           }),
           py::arg("socket"), py::arg("memory"), py::arg("memory_bytes"), py::arg("streaming"));
  py::class_<bench::StreamCopy, ReferenceCopy>(m, "StreamCopy")
      .def(py::init([](std::uint16_t port) {
             return std::make_unique<bench::StreamCopy>(bench::connect_reference(port));
           }),
           py::arg("port"));
  py::class_<bench::EchoClient>(m, "EchoClient")
      .def(py::init(
               [](std::uint16_t port, std::uint32_t request_bytes, std::uint32_t response_bytes) {
                 return std::make_unique<bench::EchoClient>(bench::connect_reference(port),
                                                            request_bytes, response_bytes);
               }),
           py::arg("port"), py::arg("request_bytes"), py::arg("response_bytes"))
      .def("round_trip", &bench::EchoClient::round_trip, ReleaseGil());
  py::class_<bench::IndexFiller>(m, "IndexFiller")
      .def(py::init<const std::string&, const std::string&, NodeId>(), py::arg("master"),
           py::arg("name"), py::arg("node"), ReleaseGil())
      .def("publish", &bench::IndexFiller::publish, py::arg("count"), ReleaseGil())
      .def("heartbeat", &bench::IndexFiller::heartbeat, ReleaseGil())
      .def("last_keys", &last_keys, py::arg("count"));
  m.def("reference_listen", &listen);
  m.def(
      "serve_shared_memory",
      [](int socket, int memory, std::uint64_t memory_bytes) {
        bench::serve_shared_memory(UniqueFd(socket), UniqueFd(memory), memory_bytes);
      },
      py::arg("socket"), py::arg("memory"), py::arg("memory_bytes"), ReleaseGil());
  m.def(
      "serve_stream",
      [](int listener, std::uint64_t memory_bytes) {
        bench::serve_stream(UniqueFd(listener), memory_bytes);
      },
      py::arg("listener"), py::arg("memory_bytes"), ReleaseGil());
  m.def(
      "serve_echo",
      [](int listener, std::uint32_t request_bytes, std::uint32_t response_bytes) {
        bench::serve_echo(UniqueFd(listener), request_bytes, response_bytes);
      },
      py::arg("listener"), py::arg("request_bytes"), py::arg("response_bytes"), ReleaseGil());
  m.def(
      "stream_copy",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
        copy_bytes(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
      },
      py::arg("to"), py::arg("from_"), py::arg("bytes"), ReleaseGil());
  m.def(
      "lookup_frame_bytes",
      [](std::uint32_t keys) {
        return py::make_tuple(
            sizeof(wire::Header) + sizeof(wire::LookupRequest) + keys * sizeof(ObjectKey),
            sizeof(wire::Header) + sizeof(wire::LookupReply) + keys * sizeof(Entry));
      },
      py::arg("keys"));
}

}  // namespace hymcache
