// Bindings of the client; typed in hymcache/_core.pyi, section "lookup".
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "lookup/csrc/prefix_matcher.h"
#include "lookup/csrc/store_client.h"
#include "transport/csrc/python_callbacks.h"
#include "transport/csrc/python_values.h"
#include "transport/csrc/verbs_python.h"

namespace py = pybind11;

namespace hymcache {
namespace {

std::shared_ptr<StoreClient> make_client(const std::vector<std::string>& masters,
                                         const std::string& transport, const py::bytes& secret,
                                         double deadline_s, double connect_timeout_s,
                                         bool verify_checksums, const std::string& name,
                                         const py::object& verbs) {
  ClientOptions options;
  for (const std::string& master : masters) options.masters.push_back(Endpoint::parse(master));
  if (transport == "auto") {
    options.transport = TransportChoice::kAuto;
  } else if (transport == "shm") {
    options.transport = TransportChoice::kShm;
  } else if (transport == "tcp") {
    options.transport = TransportChoice::kTcp;
  } else if (transport == "verbs") {
    options.transport = TransportChoice::kVerbs;
  } else {
    throw Error(ErrorKind::kConfig,
                "transport '" + transport + "' is not known: write auto, shm, verbs or tcp");
  }
  if (!verbs.is_none()) options.verbs = std::make_shared<PythonVerbsInitiator>(verbs);
  options.mac = mac_function(secret);
  options.deadline = to_duration(deadline_s);
  options.connect_timeout = to_duration(connect_timeout_s);
  options.checksums = verify_checksums;
  options.name = name;
  return std::make_shared<StoreClient>(std::move(options));
}

// A Python object's memory; held, and let go of, with the GIL.
class BufferView {
 public:
  BufferView(py::handle object, std::size_t place, bool writable) {
    const std::string name = "buffer " + std::to_string(place);
    if (PyObject_CheckBuffer(object.ptr()) == 0) {
      throw Error(ErrorKind::kConfig,
                  name + " is a " + Py_TYPE(object.ptr())->tp_name +
                      ", which has no buffer interface: pass bytes, a memoryview or a NumPy array "
                      "(of a tensor: tensor.view(torch.uint8).numpy())");
    }
    // Asked for without strides, so that whatever is not contiguous is refused.
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      const py::error_already_set reason;
      throw Error(ErrorKind::kConfig, name + ": " + std::string(py::str(reason.value())));
    }
  }
  BufferView(BufferView&& other) noexcept : view_(std::exchange(other.view_, {})) {}
  BufferView& operator=(BufferView&&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }

  Segment segment() const noexcept {
    return {.data = view_.buf, .bytes = static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

// Python buffers as the places of blocks, one for each key.
class Buffers {
 public:
  Buffers(const py::sequence& objects, std::size_t keys, bool writable) {
    if (objects.size() != keys) {
      throw Error(ErrorKind::kConfig, std::to_string(keys) + " keys and " +
                                          std::to_string(objects.size()) +
                                          " buffers: each key needs one");
    }
    for (std::size_t i = 0; i < keys; ++i) {
      const py::object object = objects[i];
      segments_.push_back(views_.emplace_back(object, i, writable).segment());
    }
  }
  BlockPlaces places() const {
    return [this](std::uint32_t i) { return std::span<const Segment>(&segments_[i], 1); };
  }

 private:
  std::vector<BufferView> views_;
  std::vector<Segment> segments_;
};

py::bytes to_bytes(std::span<const BlockStatus> statuses) {
  return {reinterpret_cast<const char*>(statuses.data()), statuses.size()};
}

py::bytes lookup(StoreClient& client, const py::bytes& raw_keys) {
  const std::vector<ObjectKey> keys = to_keys(raw_keys);
  std::vector<Entry> rows;
  {
    const py::gil_scoped_release release;
    rows = client.lookup(keys, client.deadline());
  }
  return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Entry)};
}

py::bytes get(StoreClient& client, const py::bytes& raw_keys, const py::sequence& into) {
  const std::vector<ObjectKey> keys = to_keys(raw_keys);
  const Buffers buffers(into, keys.size(), /*writable=*/true);
  std::vector<BlockStatus> statuses(keys.size(), BlockStatus::kUnavailable);
  {
    const py::gil_scoped_release release;
    const TimePoint deadline = client.deadline();
    const ReadPlan plan{.rows = client.lookup(keys, deadline), .sessions = {}};
    client.read(plan, 0, buffers.places(), {.checksums = client.options().checksums}, deadline,
                statuses);
  }
  return to_bytes(statuses);
}

py::bytes put(StoreClient& client, const py::bytes& raw_keys, const py::sequence& from,
              std::uint64_t name_space, bool prefix_order) {
  const std::vector<ObjectKey> keys = to_keys(raw_keys);
  const Buffers buffers(from, keys.size(), /*writable=*/false);
  std::vector<BlockStatus> statuses(keys.size());
  {
    const py::gil_scoped_release release;
    const TimePoint deadline = client.deadline();
    client.require_members(deadline);
    client.write(name_space, prefix_order, keys, buffers.places(),
                 {.checksums = client.options().checksums}, deadline, statuses);
  }
  return to_bytes(statuses);
}

void register_memory(StoreClient& client, std::uintptr_t address, std::size_t bytes) {
  VerbsInitiator* const verbs = client.options().verbs.get();
  if (verbs == nullptr) return;  // other transports copy from and to any memory
  verbs->register_memory(reinterpret_cast<const void*>(address), bytes);
}

py::dict by_status(const std::array<std::uint64_t, kBlockStatuses>& counts) {
  py::dict out;
  for (int i = 0; i < kBlockStatuses; ++i) {
    if (counts[i] != 0) out[block_status_name(static_cast<BlockStatus>(i))] = counts[i];
  }
  return out;
}

py::dict stats_dict(StoreClient& client) {
  ClientStats stats;
  {
    // Whoever has its locks may be closing an RDMA link, for which it needs the GIL.
    const py::gil_scoped_release release;
    stats = client.stats();
  }
  py::dict out;
  out["lookups"] = stats.lookups;
  out["hits"] = stats.hits;
  out["lookup_failures"] = stats.lookup_failures;
  out["read"] = by_status(stats.read);
  out["written"] = by_status(stats.written);
  out["shm_read_bytes"] = stats.shm.read;
  out["shm_written_bytes"] = stats.shm.written;
  out["verbs_read_bytes"] = stats.verbs.read;
  out["verbs_written_bytes"] = stats.verbs.written;
  out["verbs_links"] = stats.verbs_links;
  out["verbs_failures"] = stats.verbs_failures;
  out["verbs_fallbacks"] = stats.verbs_fallbacks;
  out["verbs_last_failure"] = stats.verbs_last_failure;
  out["tcp_read_bytes"] = stats.tcp.read;
  out["tcp_written_bytes"] = stats.tcp.written;
  out["connects"] = stats.connects;
  out["connect_failures"] = stats.connect_failures;
  out["members"] = stats.members;
  return out;
}

std::optional<Match> poll(PrefixMatcher& matcher, PrefixMatcher::Ticket ticket, double timeout_s) {
  Match match;
  bool known = false;
  bool done = false;
  if (timeout_s > 0) {
    const py::gil_scoped_release release;
    done = matcher.wait(ticket, to_duration(timeout_s), &match, &known);
  } else {
    done = matcher.poll(ticket, &match, &known);
  }
  if (!known) {
    throw Error(ErrorKind::kConfig, "there is no lookup with ticket " + std::to_string(ticket));
  }
  if (!done) return std::nullopt;
  return match;
}

}  // namespace

void bind_lookup(py::module_& m) {
  py::native_enum<BlockStatus>(m, "BlockStatus", "enum.IntEnum", "What became of one block.")
      .value("OK", BlockStatus::kOk)
      .value("MISS", BlockStatus::kMiss)
      .value("CORRUPT", BlockStatus::kCorrupt)
      .value("UNAVAILABLE", BlockStatus::kUnavailable)
      .value("DEADLINE", BlockStatus::kDeadline)
      .value("DEVICE_ERROR", BlockStatus::kDeviceError)
      .value("STORED_ALREADY", BlockStatus::kStoredAlready)
      .value("SKIP_BUFFER_FULL", BlockStatus::kSkipBufferFull)
      .value("SKIP_DEVICE_FULL", BlockStatus::kSkipDeviceFull)
      .value("SKIP_TOO_LARGE", BlockStatus::kSkipTooLarge)
      .value("SKIP_DRAINING", BlockStatus::kSkipDraining)
      .value("SKIP_PREFIX", BlockStatus::kSkipPrefix)
      .value("CANCELLED", BlockStatus::kCancelled)
      .finalize();

  py::class_<StoreClient, std::shared_ptr<StoreClient>>(m, "StoreClient")
      .def(py::init(&make_client), py::kw_only(), py::arg("masters"), py::arg("transport") = "auto",
           py::arg("secret") = py::bytes(), py::arg("deadline_s") = 10.0,
           py::arg("connect_timeout_s") = 1.0, py::arg("verify_checksums") = true,
           py::arg("name") = "client", py::arg("verbs") = py::none())
      .def("lookup", &lookup, py::arg("keys"))
      .def("get", &get, py::arg("keys"), py::arg("into"))
      .def("put", &put, py::arg("keys"), py::arg("buffers"), py::arg("name_space") = 0,
           py::arg("prefix_order") = false)
      .def("register_memory", &register_memory, py::arg("address"), py::arg("size_bytes"))
      .def("stats", &stats_dict)
      .def("close", &StoreClient::close, py::call_guard<py::gil_scoped_release>());

  py::class_<Match>(m, "Match")
      .def_readonly("hits", &Match::hits)
      .def_property_readonly("plan", [](const Match& match) { return py::bytes(match.plan); })
      .def_readonly("reason", &Match::reason)
      .def_readonly("seconds", &Match::seconds);

  // Its thread may need the GIL (for a MAC) before it ends.
  py::class_<PrefixMatcher>(m, "PrefixMatcher", py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::shared_ptr<StoreClient>>(), py::arg("client"))
      .def(
          "start",
          [](PrefixMatcher& matcher, const py::bytes& keys) {
            return matcher.start(to_keys(keys));
          },
          py::arg("keys"))
      .def("poll", &poll, py::arg("ticket"), py::arg("timeout_s") = 0.0)
      .def("take", &PrefixMatcher::take, py::arg("ticket"))
      .def("cancel", &PrefixMatcher::cancel, py::arg("ticket"));
}

}  // namespace hymcache
