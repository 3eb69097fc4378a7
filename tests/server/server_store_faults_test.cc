// SPDX-License-Identifier: Apache-2.0
// Saving meets the world: a process that ends at any stage, a disk that is full, a folder that is read-only, gone or no
// folder, a second writer. Whatever happens, a whole state can be loaded afterwards, the old one or the new one, and an
// error leaves nothing beside it. Processes that must end, or see a file system of their own, are forked.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "server/server_store_fixture.h"

namespace {

using namespace store_fixture;

using Names = std::set<std::string>;

// The wait status of a child that does `work` and exits with what it returns.
int in_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 99;
    try {
      result = work();
    } catch (...) {
    }
    ::_exit(result);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

class StoreFaults : public testing::Test {
 protected:
  // Saves `state` in a process that is killed when it reaches a stage.
  void save_and_die(const ServerState& state, const std::string& stage) {
    const int status = in_child([&] {
      save_state(path, state, [&](const char* reached) {
        if (stage == reached) ::kill(::getpid(), SIGKILL);
      });
      return 0;
    });
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "stage " << stage << " was not reached";
  }
  uint64_t newest_step(std::string* note = nullptr) {
    const std::optional<ServerState> state = load_newest(path, note);
    if (!state) return 0;
    EXPECT_TRUE(same(*state, small_state(state->step)));
    return state->step;
  }
  std::string error_of_save(const ServerState& state = small_state(9)) {
    try {
      save_state(path, state);
      return "(saved)";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      EXPECT_EQ(std::string(error.what()).rfind(path + ": ", 0), 0u) << error.what();
      return error.what();
    }
  }

  Folder folder;
  const std::string path = folder / "ps.gwc";
};

bool mentions(const std::string& text, int error) { return text.find(std::strerror(error)) != std::string::npos; }

TEST_F(StoreFaults, TheStagesComeInOrder) {
  const auto stages = [&] {
    std::vector<std::string> reached;
    save_state(path, small_state(), [&](const char* stage) { reached.push_back(stage); });
    return reached;
  };
  EXPECT_EQ(stages(), (std::vector<std::string>{"opened", "half", "written", "synced", "renamed"}));
  EXPECT_EQ(stages(), (std::vector<std::string>{"opened", "half", "written", "synced", "linked", "renamed", "kept"}));
}

TEST_F(StoreFaults, AKillAtAnyStageLeavesTheOldOrTheNewState) {
  for (const std::string stage : {"opened", "half", "written", "synced", "linked", "renamed", "kept"}) {
    save_state(path, small_state(1));
    save_state(path, small_state(2));
    ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(3), stage));
    const bool renamed = stage == "renamed" || stage == "kept";
    std::string note;
    EXPECT_EQ(load_state(path).step, renamed ? 3 : 2) << stage;
    EXPECT_EQ(newest_step(&note), renamed ? 3 : 2) << stage;
    EXPECT_EQ(note, "");
    EXPECT_EQ(load_state(path + ".old").step, stage == "kept" ? 2 : 1) << stage;
    save_state(path, small_state(4));  // takes away what the dead left
    EXPECT_EQ(newest_step(), 4u);
    EXPECT_EQ(load_state(path + ".old").step, renamed ? 3 : 2);
    EXPECT_EQ(folder.names(), (Names{"ps.gwc", "ps.gwc.old"})) << stage;
  }
}

TEST_F(StoreFaults, AKillDuringTheFirstSaveLeavesNothingOrTheState) {
  for (const std::string stage : {"opened", "half", "written", "synced"}) {
    ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(3), stage));
    EXPECT_EQ(load_newest(path), std::nullopt);
  }
  ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(3), "renamed"));
  EXPECT_EQ(newest_step(), 3u);
  EXPECT_EQ(folder.names(), Names{"ps.gwc"});
}

TEST_F(StoreFaults, ManyKillsInARowNeverLoseAState) {
  const std::vector<std::string> stages = {"opened", "half", "written", "synced", "linked", "renamed", "kept"};
  save_state(path, small_state(1));
  uint64_t last = 1;
  uint32_t random = 12345;
  for (uint64_t step = 2; step < 60; ++step) {
    random = random * 1664525u + 1013904223u;
    const std::string& stage = stages[(random >> 16) % stages.size()];
    ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(step), stage));
    const uint64_t loaded = newest_step();
    ASSERT_EQ(loaded, stage == "renamed" || stage == "kept" ? step : last) << stage;
    last = loaded;
  }
}

TEST_F(StoreFaults, ADamagedFileGivesWayToTheFormerAndTheNoteSaysSo) {
  save_state(path, small_state(1));
  save_state(path, small_state(2));
  const std::string whole = read_file(path);
  write_file(path, whole.substr(0, whole.size() / 2));
  std::string note;
  EXPECT_EQ(newest_step(&note), 1u);
  EXPECT_EQ(note.rfind(path + ": ", 0), 0u) << note;
  EXPECT_NE(note.find("went back to " + path + ".old (step 1)"), std::string::npos) << note;

  // The next save must not put the damaged file in place of the whole one before its own is there.
  ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(3), "linked"));
  EXPECT_EQ(newest_step(), 1u);
  ASSERT_NO_FATAL_FAILURE(save_and_die(small_state(3), "renamed"));
  EXPECT_EQ(newest_step(), 3u);

  fs::remove(path);
  EXPECT_EQ(newest_step(&note), 1u);
  EXPECT_TRUE(mentions(note, ENOENT)) << note;

  write_file(path, "");
  write_file(path + ".old", "rubbish!");
  const std::string field = refused(ErrorKind::frame, path, [&] { load_newest(path); });
  EXPECT_EQ(field, "file_bytes");
  fs::remove(path + ".old");
  EXPECT_EQ(refused(ErrorKind::frame, path, [&] { load_newest(path); }), "file_bytes");
  fs::remove(path);
  EXPECT_EQ(load_newest(path), std::nullopt);
  EXPECT_EQ(refused(ErrorKind::io, path, [&] { load_state(path); }), "path");
}

TEST_F(StoreFaults, APathAndItsFormerThatAreOneFileAreNoObstacle) {
  save_state(path, small_state(1));
  fs::create_hard_link(path, path + ".old");
  save_state(path, small_state(2));
  EXPECT_EQ(newest_step(), 2u);
  EXPECT_EQ(load_state(path + ".old").step, 1u);
  EXPECT_EQ(folder.names(), (Names{"ps.gwc", "ps.gwc.old"}));
}

TEST_F(StoreFaults, AFileLimitIsAnErrorThatLeavesTheLastState) {
  save_state(path, small_state(1));
  const std::string before = read_file(path);
  for (const rlim_t limit : {rlim_t{0}, rlim_t{1}, rlim_t{100}, rlim_t{before.size() - 1}}) {
    const int status = in_child([&] {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit bound{limit, limit};
      if (::setrlimit(RLIMIT_FSIZE, &bound) != 0) return 98;
      return mentions(error_of_save(small_state(2)), EFBIG) ? 0 : 1;
    });
    EXPECT_EQ(status, 0) << limit;
    EXPECT_EQ(read_file(path), before);
    EXPECT_EQ(folder.names(), Names{"ps.gwc"});
  }
}

// A small file system that only this child sees. Exit 77: mounting is not allowed here.
int with_small_disk(const Folder& folder, const std::function<int()>& work) {
  return in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
      return 77;
    return work();
  });
}

TEST_F(StoreFaults, AFullDiskIsAnErrorThatLeavesTheLastState) {
  const int status = with_small_disk(folder, [&] {
    save_state(path, small_state(1));
    ServerState large = small_state(2);
    large.weights.push_back({"large", {1 << 16}, std::vector<float>(1 << 16, 1.0f)});
    if (!mentions(error_of_save(large), ENOSPC)) return 1;
    if (folder.names() != Names{"ps.gwc"}) return 2;
    if (newest_step() != 1) return 3;
    save_state(path, small_state(3));  // and with room again it goes on
    return newest_step() == 3 && load_state(path + ".old").step == 1 ? 0 : 4;
  });
  if (status == 77 << 8) GTEST_SKIP() << "mounting is not allowed here";
  EXPECT_EQ(status, 0);
}

TEST_F(StoreFaults, AReadOnlyFolderIsAnErrorThatLeavesTheLastState) {
  const int status = with_small_disk(folder, [&] {
    save_state(path, small_state(1));
    if (::mount("none", folder.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=64k") != 0) return 77;
    if (!mentions(error_of_save(), EROFS)) return 1;
    if (folder.names() != Names{"ps.gwc"}) return 2;
    return newest_step() == 1 ? 0 : 3;
  });
  if (status == 77 << 8) GTEST_SKIP() << "mounting is not allowed here";
  EXPECT_EQ(status, 0);
}

TEST(StoreFolders, AFolderThatIsGoneOrNoFolderOrTakesNoFilesIsAnErrorWithItsReason) {
  const Folder folder;
  write_file(folder / "file", "x");
  const auto error = [](const std::string& path) {
    try {
      save_state(path, small_state());
      return std::string("(saved)");
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::io);
      EXPECT_EQ(std::string(e.what()).rfind(path + ": ", 0), 0u) << e.what();
      return std::string(e.what());
    }
  };
  EXPECT_TRUE(mentions(error(folder / "gone/ps.gwc"), ENOENT));
  EXPECT_TRUE(mentions(error(folder / "file/ps.gwc"), ENOTDIR));
  EXPECT_NE(error("/proc/self/ps.gwc"), "(saved)");
  EXPECT_NE(error(folder / ""), "(saved)");
  EXPECT_NE(error(""), "(saved)");
  fs::create_directory(folder / "folder");
  EXPECT_NE(error(folder / "folder"), "(saved)");
  EXPECT_TRUE(mentions(error(folder / std::string(255, 'x')), ENAMETOOLONG));
  EXPECT_EQ(folder.names(), (Names{"file", "folder"}));
}

TEST_F(StoreFaults, AFolderThatVanishesWhileSavingIsAnError) {
  fs::create_directory(folder / "inner");
  const std::string inner = folder / "inner/ps.gwc";
  EXPECT_EQ(refused(ErrorKind::io, inner,
                    [&] {
                      save_state(inner, small_state(), [&](const char* stage) {
                        if (std::string(stage) == "written") fs::remove_all(folder / "inner");
                      });
                    }),
            "path");
  EXPECT_EQ(folder.names(), Names{});
}

TEST_F(StoreFaults, ADeviceOrPipeAtThePathIsNotReplacedNorWaitedFor) {
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(error_of_save(), "(saved)");
  EXPECT_TRUE(fs::is_fifo(path));
  EXPECT_EQ(refused(ErrorKind::io, path, [&] { SafetensorsFile file(path); }), "path");
  fs::remove(path);
  fs::create_symlink("/dev/full", path);
  EXPECT_NE(error_of_save(), "(saved)");
  EXPECT_EQ(folder.names(), Names{"ps.gwc"});
}

TEST_F(StoreFaults, ATemporaryNameThatPointsElsewhereIsNotFollowed) {
  write_file(folder / "precious", "precious");
  fs::create_symlink(folder / "precious", path + ".tmp");
  EXPECT_TRUE(mentions(error_of_save(), ELOOP));
  fs::remove(path + ".tmp");
  fs::create_hard_link(folder / "precious", path + ".tmp");
  save_state(path, small_state(5));
  EXPECT_EQ(newest_step(), 5u);
  EXPECT_EQ(read_file(folder / "precious"), "precious");
  EXPECT_EQ(folder.names(), (Names{"precious", "ps.gwc"}));
}

TEST_F(StoreFaults, ALongerTemporaryFileOfADeadWriterLeavesNothingInTheNewOne) {
  write_file(path + ".tmp", std::string(100000, 'x'));
  write_file(path + ".old.tmp", "x");
  save_state(path, small_state(5));
  EXPECT_EQ(newest_step(), 5u);
  EXPECT_EQ(folder.names(), Names{"ps.gwc"});
}

TEST_F(StoreFaults, ASecondWriterIsRefusedWhileTheFirstWrites) {
  save_state(path, small_state(1), [&](const char* stage) {
    const std::string error = error_of_save(small_state(2));
    const bool done = std::string(stage) == "renamed";
    EXPECT_EQ(error == "(saved)", done) << error;
    EXPECT_EQ(error.find("somebody else is writing") == std::string::npos, done) << error;
  });
  EXPECT_EQ(newest_step(), 2u);
}

TEST_F(StoreFaults, AnExceptionOfTheHookTakesTheTemporaryFileAway) {
  save_state(path, small_state(1));
  for (const std::string stage : {"opened", "half", "written", "synced", "linked"}) {
    const auto hook = [&](const char* reached) {
      if (stage == reached) throw std::runtime_error(stage);
    };
    EXPECT_THROW(save_state(path, small_state(2), hook), std::runtime_error);
    EXPECT_EQ(newest_step(), 1u);
    EXPECT_EQ(folder.names(), Names{"ps.gwc"}) << stage;
  }
}

TEST_F(StoreFaults, AFileThatIsCutWhileItIsOpenIsAnErrorNotASignal) {
  save_state(path, small_state(1));
  const SafetensorsFile file(path);
  fs::resize_file(path, fs::file_size(path) - 8);
  EXPECT_EQ(refused(ErrorKind::frame, path, [&] { file.read(file.tensors().back()); }), "file_bytes");
}

TEST_F(StoreFaults, AnOpenFileStaysTheOneThatWasChecked) {
  save_state(path, small_state(1));
  const SafetensorsFile file(path);
  save_state(path, small_state(2));
  save_state(path, small_state(3));
  EXPECT_EQ(file.read_f32(*file.find("bn.running_mean"))[2], 1.0f);
}

}  // namespace
