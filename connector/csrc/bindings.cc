// Bindings of the transfer engine; typed in hymcache/_core.pyi, section "connector".
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "connector/csrc/transfer_engine.h"
#include "transport/csrc/python_values.h"

namespace py = pybind11;

namespace hymcache {
namespace {

using BlockIds = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

std::vector<std::int64_t> to_blocks(const BlockIds& ids) {
  return {ids.data(), ids.data() + ids.size()};
}

BlockLayout make_layout(const std::vector<std::uintptr_t>& bases,
                        const std::vector<std::int64_t>& strides,
                        const std::vector<std::uint64_t>& sizes, std::int64_t num_blocks) {
  if (bases.size() != strides.size() || bases.size() != sizes.size()) {
    throw Error(ErrorKind::kConfig, "bases, strides and sizes must be equally long");
  }
  std::vector<BlockLayout::Piece> pieces;
  for (std::size_t i = 0; i < bases.size(); ++i) {
    pieces.push_back(
        {.base = reinterpret_cast<std::byte*>(bases[i]), .stride = strides[i], .bytes = sizes[i]});
  }
  return {std::move(pieces), num_blocks};
}

void submit_save(TransferEngine& engine, std::int64_t job, std::uint32_t layout,
                 const py::bytes& raw_keys, std::uint64_t name_space, const BlockIds& blocks,
                 double deadline_s) {
  engine.submit_save(job, layout, to_keys(raw_keys), name_space, to_blocks(blocks),
                     to_duration(deadline_s));
}

}  // namespace

void bind_connector(py::module_& m) {
  py::class_<BlockLayout>(m, "BlockLayout")
      .def(py::init(&make_layout), py::arg("bases"), py::arg("strides"), py::arg("sizes"),
           py::arg("num_blocks"))
      .def_property_readonly("num_blocks", &BlockLayout::blocks)
      .def_property_readonly("block_bytes", &BlockLayout::block_bytes);

  py::class_<TransferResult>(m, "TransferResult")
      .def_readonly("job", &TransferResult::job)
      .def_readonly("is_load", &TransferResult::is_load)
      .def_property_readonly("statuses",
                             [](const TransferResult& result) {
                               return py::bytes(
                                   reinterpret_cast<const char*>(result.statuses.data()),
                                   result.statuses.size());
                             })
      .def_readonly("bytes_moved", &TransferResult::bytes_moved)
      .def_readonly("seconds", &TransferResult::seconds)
      .def_readonly("transport", &TransferResult::transport);

  // Its threads may need the GIL (for a MAC) before they end.
  py::class_<TransferEngine>(m, "TransferEngine", py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<StoreClient> client, const std::vector<BlockLayout>& layouts,
                       std::uint32_t load_threads, std::uint32_t save_threads) {
             return std::make_unique<TransferEngine>(std::move(client), layouts, load_threads,
                                                     save_threads);
           }),
           py::arg("client"), py::arg("layouts"), py::kw_only(), py::arg("load_threads") = 1,
           py::arg("save_threads") = 1)
      .def(
          "submit_load",
          [](TransferEngine& engine, std::int64_t job, std::uint32_t layout, const py::bytes& plan,
             std::uint32_t first, const BlockIds& blocks, double deadline_s) {
            engine.submit_load(job, layout, std::string(plan), first, to_blocks(blocks),
                               to_duration(deadline_s));
          },
          py::arg("job"), py::arg("layout"), py::arg("plan"), py::arg("first"),
          py::arg("block_ids"), py::arg("deadline_s"))
      .def("submit_save", &submit_save, py::arg("job"), py::arg("layout"), py::arg("keys"),
           py::arg("name_space"), py::arg("block_ids"), py::arg("deadline_s"))
      .def("poll", &TransferEngine::poll)
      .def(
          "wait",
          [](TransferEngine& engine, const std::vector<std::int64_t>& jobs, double timeout_s) {
            return engine.wait(jobs, to_duration(timeout_s));
          },
          py::arg("jobs"), py::arg("timeout_s"), ReleaseGil())
      .def("cancel", &TransferEngine::cancel, py::arg("jobs"))
      .def("close", &TransferEngine::close, ReleaseGil());
}

}  // namespace hymcache
