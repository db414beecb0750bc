// Bindings of the storage node; typed in hymcache/_core.pyi, section "kv_manager".
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "chm_device/csrc/file_device.h"
#include "kv_manager/csrc/storage_node.h"
#include "transport/csrc/python_callbacks.h"
#include "transport/csrc/verbs_python.h"

namespace py = pybind11;

namespace hymcache {
namespace {

std::unique_ptr<StorageNode> make_node(NodeId id, const std::string& name,
                                       const std::string& listen, const std::string& advertise_host,
                                       const std::string& unix_path,
                                       const std::vector<std::string>& masters,
                                       std::uint32_t connections_max, const py::bytes& secret,
                                       const py::object& log, const py::object& warn,
                                       FileDeviceOptions device, std::uint16_t protocol_version_max,
                                       const py::object& verbs) {
  StorageNodeOptions options;
  options.name = name;
  options.listen = Endpoint::parse(listen);
  options.advertise_host = advertise_host;
  options.unix_path = unix_path;
  for (const std::string& master : masters) options.masters.push_back(Endpoint::parse(master));
  options.connections_max = connections_max;
  options.mac = mac_function(secret);
  options.log = log_function(log);
  options.warn = log_function(warn);
  options.protocol_version_max = protocol_version_max;
  device.log = options.warn;
  std::unique_ptr<Device> opened;
  {
    const py::gil_scoped_release release;
    opened = open_file_device(device);
  }
  if (!verbs.is_none()) {
    auto acceptor = std::make_shared<PythonVerbsAcceptor>(verbs);
    const DeviceRegion& region = opened->region();
    if (acceptor->prepare(region.base, region.bytes, region.read_write_offset)) {
      options.verbs = std::move(acceptor);
    }
  }
  const py::gil_scoped_release release;
  return std::make_unique<StorageNode>(id, std::move(options), std::move(opened));
}

py::dict refusals(const WriteStats& writes) {
  py::dict refused;
  const auto put = [&](const char* name, wire::OfferState state) {
    refused[name] = writes.refused[static_cast<std::size_t>(state)];
  };
  put("stored_already", wire::OfferState::kStored);
  put("buffer_full", wire::OfferState::kBufferFull);
  put("device_full", wire::OfferState::kDeviceFull);
  put("too_large", wire::OfferState::kTooLarge);
  put("draining", wire::OfferState::kDraining);
  return refused;
}

py::list master_links(const StorageNodeStats& stats) {
  py::list links;
  for (const MasterLinkStats& link : stats.masters) {
    py::dict row;
    row["endpoint"] = link.endpoint;
    row["state"] = link.state;
    row["last_error"] = link.last_error;
    row["connects"] = link.connects;
    row["published"] = link.published;
    row["withdrawn"] = link.withdrawn;
    row["refused"] = link.refused;
    links.append(row);
  }
  return links;
}

py::dict stats_dict(StorageNode& node) {
  StorageNodeStats stats;
  {
    const py::gil_scoped_release release;
    stats = node.stats();
  }
  py::dict out;
  out["node"] = stats.node;
  out["incarnation"] = stats.incarnation;
  out["draining"] = stats.draining;
  out["objects"] = stats.objects;
  out["object_bytes"] = stats.object_bytes;
  out["index_bytes"] = stats.index_bytes;
  out["corrupt_dropped"] = stats.corrupt_dropped;
  out["corrupt_reports"] = stats.reports;
  out["flush_failures"] = stats.flush_failures;
  const DeviceStats& device = stats.device;
  out["device_capacity_bytes"] = device.capacity_bytes;
  out["device_used_bytes"] = device.used_bytes;
  out["device_live_bytes"] = device.live_bytes;
  out["device_reads"] = device.reads;
  out["device_read_bytes"] = device.read_bytes;
  out["device_read_errors"] = device.read_errors;
  out["device_writes"] = device.writes;
  out["device_written_bytes"] = device.written_bytes;
  out["device_write_errors"] = device.write_errors;
  out["device_resident_hits"] = device.resident_hits;
  out["staging_bytes"] = device.staging_bytes;
  out["staging_used_bytes"] = device.staging_used_bytes;
  out["write_buffer_bytes"] = device.write_buffer_bytes;
  out["write_buffer_used_bytes"] = device.write_buffer_used_bytes;
  const SessionStats& sessions = stats.sessions;
  out["sessions"] = sessions.sessions;
  out["sessions_opened"] = sessions.opened;
  out["sessions_expired"] = sessions.expired;
  out["blocks_ready"] = sessions.blocks_ready;
  out["blocks_missed"] = sessions.blocks_missed;
  out["blocks_failed"] = sessions.blocks_failed;
  out["blocks_revoked"] = sessions.blocks_revoked;
  out["bytes_sent"] = sessions.bytes_sent;
  out["bytes_handed"] = sessions.bytes_handed;
  const WriteStats& writes = stats.writes;
  out["writes_offered"] = writes.offered;
  out["writes_granted"] = writes.granted;
  out["writes_open"] = writes.open;
  out["writes_committed"] = writes.committed;
  out["writes_committed_bytes"] = writes.committed_bytes;
  out["writes_aborted"] = writes.aborted;
  out["writes_refused"] = refusals(writes);
  const VerbsPeerStats& verbs = stats.verbs;
  out["verbs_peers"] = verbs.peers;
  out["verbs_connects"] = verbs.connects;
  out["verbs_refused"] = verbs.refused;
  out["verbs_keys_made"] = verbs.keys_made;
  out["verbs_keys_missing"] = verbs.keys_missing;
  out["verbs_keys_stuck"] = verbs.keys_stuck;
  out["verbs_keys_held"] = verbs.keys_held;
  out["connections"] = stats.server.connections;
  out["connections_accepted"] = stats.server.accepted;
  out["connections_refused"] = stats.server.refused;
  out["protocol_errors"] = stats.server.protocol_errors;
  out["frames"] = stats.server.frames;
  out["masters"] = master_links(stats);
  return out;
}

}  // namespace

void bind_kv_manager(py::module_& m) {
  py::class_<FileDeviceOptions>(m, "FileDeviceOptions")
      .def(py::init([](std::string path, std::uint64_t capacity_bytes, std::uint64_t staging_bytes,
                       std::uint64_t write_buffer_bytes, std::string io, std::uint32_t io_depth,
                       bool preallocate, std::uint64_t segment_bytes) {
             FileDeviceOptions options;
             options.path = std::move(path);
             options.capacity_bytes = capacity_bytes;
             options.staging_bytes = staging_bytes;
             options.write_buffer_bytes = write_buffer_bytes;
             options.io = std::move(io);
             options.io_depth = io_depth;
             options.preallocate = preallocate;
             options.segment_bytes = segment_bytes;
             return options;
           }),
           py::kw_only(), py::arg("path"), py::arg("capacity_bytes"), py::arg("staging_bytes"),
           py::arg("write_buffer_bytes"), py::arg("io") = "auto", py::arg("io_depth") = 16,
           py::arg("preallocate") = true, py::arg("segment_bytes") = 0);

  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  // Its thread may need the GIL (to log) before it ends.
  py::class_<StorageNode>(m, "StorageNode", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_node), py::kw_only(), py::arg("node"), py::arg("name"), py::arg("listen"),
           py::arg("advertise_host") = "", py::arg("unix_path") = "",
           py::arg("masters") = std::vector<std::string>{}, py::arg("connections_max") = 4096,
           py::arg("secret") = py::bytes(), py::arg("log"), py::arg("warn"), py::arg("device"),
           py::arg("protocol_version_max") = wire::kVersionMax, py::arg("verbs") = py::none())
      .def("endpoints", &StorageNode::endpoints, ReleaseGil())
      .def("device_description", &StorageNode::device_description, ReleaseGil())
      .def("stats", &stats_dict)
      .def("set_draining", &StorageNode::set_draining, py::arg("draining"), ReleaseGil())
      .def("stop", &StorageNode::stop, ReleaseGil());
}

}  // namespace hymcache
