// Bindings of the master; typed in hymcache/_core.pyi, section "master".
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "master/csrc/master_server.h"
#include "transport/csrc/python_callbacks.h"

namespace py = pybind11;

namespace hymcache {
namespace {

// Stopping waits for the loop's thread, which may be waiting for the GIL to compute a MAC.
struct DeleteWithoutGil {
  void operator()(MasterServer* master) const {
    const py::gil_scoped_release release;
    delete master;
  }
};
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

std::unique_ptr<MasterServer, DeleteWithoutGil> make_master(
    const std::vector<std::string>& listen, std::string name, std::uint32_t lease_ms,
    std::uint32_t connections_max, std::uint32_t rows_max, const py::bytes& secret) {
  MasterOptions options;
  for (const std::string& text : listen) options.listen.push_back(Endpoint::parse(text));
  options.name = std::move(name);
  options.lease = std::chrono::milliseconds(lease_ms);
  options.connections_max = connections_max;
  options.rows_max = rows_max;
  options.mac = mac_function(secret);
  return std::unique_ptr<MasterServer, DeleteWithoutGil>(new MasterServer(std::move(options)));
}

template <class Function>
auto without_gil(Function function) {
  const py::gil_scoped_release release;
  return function();
}

py::dict stats(const MasterServer& master) {
  const MasterStats stats = without_gil([&] { return master.stats(); });
  const MasterCounters& counters = stats.counters;
  py::dict out;
  out["lookups"] = counters.lookups;
  out["lookup_keys"] = counters.lookup_keys;
  out["lookup_hits"] = counters.lookup_hits;
  out["registrations"] = counters.registrations;
  out["registrations_refused"] = counters.registrations_refused;
  out["leases_lapsed"] = counters.leases_lapsed;
  out["rows_published"] = counters.rows_published;
  out["rows_refused"] = counters.rows_refused;
  out["rows_withdrawn"] = counters.rows_withdrawn;
  out["rows_swept"] = counters.rows_swept;
  out["connections"] = stats.server.connections;
  out["connections_accepted"] = stats.server.accepted;
  out["connections_refused"] = stats.server.refused;
  out["protocol_errors"] = stats.server.protocol_errors;
  out["frames"] = stats.server.frames;
  out["nodes_alive"] = stats.nodes_alive;
  out["nodes_lost"] = stats.nodes_lost;
  out["rows"] = stats.rows;
  out["rows_hidden"] = stats.rows_hidden;
  out["rows_max"] = stats.rows_max;
  out["index_bytes"] = stats.index_bytes;
  out["cpu_seconds"] = static_cast<double>(stats.cpu_ns) / 1e9;
  out["namespaces"] = stats.namespaces;
  out["largest_namespaces"] = stats.largest_namespaces;
  return out;
}

const char* state_name(const NodeRecord& node) {
  if (!node.alive()) return "lost";
  return node.draining ? "draining" : "alive";
}

std::string hex(const wire::HostId& host) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : host) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::vector<py::dict> members(const MasterServer& master) {
  std::vector<py::dict> out;
  for (const NodeStatus& status : without_gil([&] { return master.members(); })) {
    const NodeRecord& node = status.record;
    py::dict row;
    row["node"] = node.member.node;
    row["name"] = wire::from_text(node.member.name);
    row["state"] = state_name(node);
    row["draining"] = node.draining;
    row["connected"] = node.peer != 0;
    row["incarnation"] = node.member.incarnation;
    row["epoch"] = node.epoch;
    row["tcp"] = wire::from_text(node.member.tcp);
    row["unix_path"] = wire::from_text(node.member.unix_path);
    row["host"] = hex(node.member.host);
    row["capacity_bytes"] = node.member.capacity_bytes;
    row["used_bytes"] = node.member.used_bytes;
    row["objects"] = node.objects;
    row["sessions"] = node.sessions;
    row["rows"] = node.alive() ? node.rows_shown : 0;
    row["lease_left_ms"] = status.lease_left_ms;
    row["state_age_ms"] = status.state_age_ms;
    out.push_back(std::move(row));
  }
  return out;
}

py::dict found_row(const FoundRow& found) {
  const Entry& entry = found.entry;
  py::dict row;
  row["node"] = entry.node;
  row["node_name"] = found.node_name;
  row["shown"] = found.shown;
  row["address"] = entry.address;
  row["length"] = entry.length;
  row["generation"] = entry.generation;
  row["name_space"] = entry.name_space;
  row["crc32c"] = (entry.flags & Entry::kHasCrc) != 0 ? py::object(py::int_(entry.crc32c))
                                                      : py::object(py::none());
  row["epoch"] = entry.epoch;
  return row;
}

std::vector<std::vector<py::dict>> lookup(const MasterServer& master,
                                          const std::vector<py::bytes>& keys) {
  std::vector<ObjectKey> wanted;
  for (const std::string_view raw : keys) {
    ObjectKey key;
    if (raw.size() != key.size()) {
      throw Error(ErrorKind::kConfig, "a key has " + std::to_string(key.size()) + " bytes, not " +
                                          std::to_string(raw.size()));
    }
    std::copy(raw.begin(), raw.end(), key.begin());
    wanted.push_back(key);
  }
  std::vector<std::vector<py::dict>> out;
  for (const auto& rows : without_gil([&] { return master.lookup(wanted); })) {
    std::vector<py::dict>& key_rows = out.emplace_back();
    for (const FoundRow& row : rows) key_rows.push_back(found_row(row));
  }
  return out;
}

std::vector<std::string> endpoints(const MasterServer& master) {
  std::vector<std::string> texts;
  for (const Endpoint& endpoint : master.endpoints()) texts.push_back(endpoint.text());
  return texts;
}

std::uint64_t wait_members(const MasterServer& master, std::uint64_t known, double timeout_s) {
  // Bounded, so that no number of seconds overflows the clock.
  const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, 86'400.0));
  return master.wait_members(known, std::chrono::duration_cast<Clock::duration>(timeout));
}

}  // namespace

void bind_master(py::module_& m) {
  py::class_<MasterServer, std::unique_ptr<MasterServer, DeleteWithoutGil>>(m, "MasterServer")
      .def(py::init(&make_master), py::arg("listen"), py::kw_only(), py::arg("name"),
           py::arg("lease_ms"), py::arg("connections_max"),
           py::arg("rows_max") = MasterOptions::kRowsMaxDefault, py::arg("secret") = py::bytes())
      .def("start", &MasterServer::start, ReleaseGil())
      .def("stop", &MasterServer::stop, ReleaseGil())
      .def("endpoints", &endpoints)
      .def("incarnation", &MasterServer::incarnation)
      .def("stats", &stats)
      .def("members", &members)
      .def("wait_members", &wait_members, py::arg("known"), py::arg("timeout_s"), ReleaseGil())
      .def("lookup", &lookup, py::arg("keys"))
      .def("drain", &MasterServer::drain, py::arg("node"), py::arg("draining"), ReleaseGil())
      .def("forget", &MasterServer::forget, py::arg("node"), ReleaseGil());
}

}  // namespace hymcache
